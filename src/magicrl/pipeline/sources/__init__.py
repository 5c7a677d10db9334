"""Where problems come from: known data sets, files by a field mapping, the released schema."""
