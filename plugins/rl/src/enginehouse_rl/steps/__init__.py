"""A step is a list of stages, which the plan makes; here is a file a stage, and what a step does with its batch."""
