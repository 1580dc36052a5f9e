//! Moves running virtual machines between sites: the agent and the commands.

mod agent;
mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::run()
}
