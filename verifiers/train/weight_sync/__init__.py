"""Kinds of weight sync; what they have in common is `protocol.WeightSync`."""
