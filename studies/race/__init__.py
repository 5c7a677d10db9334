"""Methods that raced for off-policy stability (docs/evidence/study.md), a file each, through the doors of
docs/guides/custom-parts.md."""
