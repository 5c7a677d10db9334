"""Methods that race for off-policy stability, a file each, through the doors of docs/own.md. Which of them run, with
which settings: ``studies/race.toml``."""
