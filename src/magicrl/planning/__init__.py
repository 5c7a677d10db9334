"""What a training step costs before it is run: memory, time, and the GPUs it needs.

``hardware`` and ``shapes`` describe machines and models, ``costs`` and ``memory`` are pure functions of them,
``lengths`` and ``simulator`` play a rollout event by event, ``schedules`` puts steps together, ``fit`` finds the few
unknowns from published tables, ``layouts`` and ``planner`` choose. numpy and scipy only, no torch.
"""
