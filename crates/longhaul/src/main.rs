//! Moves running virtual machines between sites: the agent and the commands people type.

fn main() {}
