"""Problems: generated task families, file readers, filters, the stateful prompt sampler. Imports no torch."""
