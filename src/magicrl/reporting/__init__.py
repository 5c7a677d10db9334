"""Run folder -> tables, figures, one self-contained HTML page. Imports no torch."""
