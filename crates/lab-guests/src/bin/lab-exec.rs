//! Opens the descriptors that a QEMU's command line names by numbers, then becomes that QEMU.

use std::path::PathBuf;
use std::process::ExitCode;

use longhaul_lab::lab::say;

fn main() -> ExitCode {
    let Some(order) = std::env::args_os().nth(1).map(PathBuf::from) else {
        say("usage: lab-exec FILE (it is started by `lab guests`)");
        return ExitCode::from(2);
    };
    let error = longhaul_lab_guests::exec::become_qemu(&order);
    say(&format!("error: {error}"));
    ExitCode::from(2)
}
