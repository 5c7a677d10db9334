"""Methods that raced for off-policy stability (docs/race.md), a file each, through the doors of docs/own.md."""
