"""The supervised recipe of a start model that is made in seconds and answers some problems of its family."""

SFT = """
[run]
name = "toy-start"
threads = 1

[model.tiny]
hidden_size = 32
heads = 2
layers = 1
intermediate_size = 64
max_context = 64

[training]
dtype = "float32"

[[phases]]
family = "running_sum"
options = { variant = "stages", max_tokens = 32 }
steps = 60
batch_size = 32
learning_rate = 5e-3
"""
