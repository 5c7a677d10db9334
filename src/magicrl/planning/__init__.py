"""Cost of a training step before it is run: memory, layouts that fit, and time in closed form.

``hardware`` and ``shapes`` describe machines and models, ``costs`` and ``memory`` are pure functions of them,
``workload`` has response lengths and the time of a step, ``layouts`` finds what fits, ``planner`` makes the plan. The
package needs neither numpy nor torch.
"""
