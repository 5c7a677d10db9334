"""Trackers: TensorBoard, W&B and trackio as mirrors of the run folder, which stays the record of a run."""
