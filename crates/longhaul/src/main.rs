//! Moves running virtual machines between sites: the agent and the commands people type.

mod agent;

use std::process::ExitCode;

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    let config = std::env::args_os().nth(1).map(std::path::PathBuf::from);
    let Ok(runtime) = tokio::runtime::Runtime::new() else {
        return ExitCode::FAILURE;
    };
    match runtime.block_on(agent::run(config.as_deref())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(hint = error.hint, "{error}");
            ExitCode::FAILURE
        }
    }
}
