"""What a training step costs before it is run: memory, layouts that fit, and time in closed form.

``hardware`` and ``shapes`` describe machines and models, ``costs`` and ``memory`` are pure functions of them,
``workload`` has response lengths and the seconds of a step, ``layouts`` says what fits, ``planner`` makes the plan.
The standard library only: no numpy, no torch.
"""
