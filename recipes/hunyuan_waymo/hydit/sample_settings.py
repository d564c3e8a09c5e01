"""Prompts and steps of the samples: edit them here, or give --sample_prompts and --sample_steps."""

prompts = [
    "A residential street scene with wet roads and parked cars during daytime",
    "An urban intersection with traffic lights and multiple vehicles",
    "A highway scene with clear lane markings and distant cars",
    "A rainy street with reflections on the pavement and buildings",
    "A suburban road with trees and houses on both sides",
    "A parking lot scene with various parked vehicles",
    "A city street with pedestrian crossings and traffic signs",
    "A rural road with natural scenery and minimal traffic",
]

num_steps = 10
