"""Methods that raced for off-policy stability (docs/evidence/race.md), a file each, through the doors of
docs/guides/custom-parts.md."""
