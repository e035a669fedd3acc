"""Optimisers as the paper uses them, schedules as pure functions of the step, averaging of weights."""
