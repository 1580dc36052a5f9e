//! The devices of a network on this host: a TAP, over which frames leave and arrive, and a bridge
//! that joins it with the guests.
//!
//! Their names follow from the network's id, so what a killed agent left behind is found again. The
//! host has no address in a network and does not speak in it.

mod bridge;
mod device;

pub use bridge::{Bridge, BridgeConfig, Leftover, VlanFilter, leftovers, names};
pub(crate) use bridge::{remove, set_up_alone};
pub use device::{Tap, TapCounters, TapError};

use std::io::{self, Write};
use std::process::{Command, Stdio};

/// The search path of started programs.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Runs a program of iproute2 with a batch of commands.
fn batch(program: &str, commands: &str) -> io::Result<()> {
    run(program, &["-batch", "-"], commands).map(|_| ())
}

/// Returns what `ip` says of links.
fn links(of: &[&str]) -> io::Result<Vec<Link>> {
    let mut arguments = vec!["-json", "link", "show"];
    arguments.extend(of);
    let said = run("ip", &arguments, "")?;
    if said.trim_ascii().is_empty() {
        return Ok(Vec::new());
    }
    serde_json::from_slice(&said).map_err(io::Error::other)
}

/// An interface, as `ip` shows it. Where nothing is to be shown, it may show an empty one.
#[derive(Debug, serde::Deserialize)]
struct Link {
    #[serde(default)]
    ifname: String,
    #[serde(default)]
    ifalias: String,
}

fn run(program: &str, arguments: &[&str], input: &str) -> io::Result<Vec<u8>> {
    let start =
        |error: io::Error| io::Error::new(error.kind(), format!("cannot start {program}: {error}"));
    let mut child = Command::new(program)
        .args(arguments)
        .env("PATH", PATH)
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(start)?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let error = String::from_utf8_lossy(&output.stderr);
    let error = error.lines().next().unwrap_or("it says nothing").trim();
    Err(io::Error::other(format!("{program} refuses: {error}")))
}
