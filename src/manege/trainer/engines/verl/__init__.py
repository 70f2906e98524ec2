"""The train engine for many machines: verl's training workers over Ray.

Nothing is imported here: a worker that unpickles one of these modules first would import verl half-way.
"""
