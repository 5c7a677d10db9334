"""The steps of a pipeline, one module each."""
