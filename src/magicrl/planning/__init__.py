"""What a training step costs before it is run: memory, time, and the GPUs it needs.

``hardware`` and ``shapes`` describe machines and models, ``costs`` and ``memory`` are pure functions of them,
``simulator`` plays rollouts and steps event by event, ``workload`` has response lengths and puts one step together,
``layouts`` and ``planner`` choose. numpy and scipy only, no torch.
"""
