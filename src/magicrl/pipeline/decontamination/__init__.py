"""Problems of evaluation sets found in training sets."""
