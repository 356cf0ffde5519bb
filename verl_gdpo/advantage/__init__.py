"""Tensors only: the equation, its inputs, and the variants of its second step."""
