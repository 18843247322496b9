"""The stages of a training step, each in its own file. The plan chooses and orders the stages of a run."""
