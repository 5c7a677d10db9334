"""Pure tensor functions of the recipe: no I/O, no process groups, no config object, no logging."""
