"""Engines that generate: the protocol, in process, replayed."""
