"""What a training step costs before it is run: memory, time, and the GPUs it needs.

``hardware`` and ``shapes`` describe machines and models, ``costs`` and ``memory`` are pure functions of them,
``lengths`` and ``simulator`` play rollouts and steps event by event, ``workload`` puts one step together, ``layouts``
and ``planner`` choose. numpy and scipy only, no torch.
"""
