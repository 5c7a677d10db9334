"""Methods of the race for off-policy stability (docs/evidence/study.md), one file each, as custom parts
(docs/guides/custom-parts.md)."""
