"""Engines that hold weights and optimiser, behind one Protocol."""
