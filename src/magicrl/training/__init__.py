"""The loop, the learner, stages, checkpoint, metrics, supervised start."""
