"""Fitting, calibrating and costing exits that are in a graph, and losses to train them with."""
