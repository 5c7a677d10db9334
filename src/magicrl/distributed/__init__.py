"""Ray, FSDP2 and what runs on them: the same protocols as the parts of one machine."""
