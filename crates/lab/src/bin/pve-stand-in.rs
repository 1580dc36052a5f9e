//! Implements the program `pve-stand-in`, which stands in for commands of Proxmox VE on emulated
//! hosts, under their names: `qm`, `pvesm`, `pvesh` and `pve-bridge`.

use longhaul_lab::lab::say;
use longhaul_lab::proxmox::commands::command;
use std::path::Path;
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut words = std::env::args();
    let program = words.next().unwrap_or_default();
    let name = Path::new(&program).file_name().unwrap_or_default();
    let words: Vec<String> = words.collect();
    match command(&name.to_string_lossy(), &words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            say(&why);
            ExitCode::from(255)
        }
    }
}
