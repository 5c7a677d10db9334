"""The learner over many devices: FSDP2 ranks behind the calls of ``training.protocols.Learner``."""
