//! Implements the program `lab-link`: the process of one link, which a laboratory starts beside
//! itself.

use longhaul_lab::error::LabError;
use longhaul_lab::lab::say;
use longhaul_lab::link::emulator::{EmulatorConfig, run_emulator};
use std::process::ExitCode;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&format!("error: {error}"));
            ExitCode::from(2)
        }
    }
}

/// Emulates the link of the only argument, an [`EmulatorConfig`] in JSON, until its standard input
/// ends.
fn run() -> Result<(), LabError> {
    let config = std::env::args().nth(1).unwrap_or_default();
    let config: EmulatorConfig =
        serde_json::from_str(&config).map_err(|error| LabError::Answer {
            what: "the link's configuration".to_owned(),
            message: error.to_string(),
        })?;
    run_emulator(&config)
}
