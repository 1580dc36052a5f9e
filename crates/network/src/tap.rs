//! The devices of a network on this host: a TAP, over which frames leave and arrive, and a bridge
//! that joins it with the guests.
//!
//! Their names follow from the network's id, so what a killed agent left behind is found again. The
//! host has no address in a network and does not speak in it, unless it has the network's gateway:
//! that is another TAP device, and rules of nftables.

mod bridge;
mod device;
mod gateway;
mod nat;

pub use bridge::{Bridge, BridgeConfig, Leftover, VlanFilter, leftovers, names};
pub(crate) use bridge::{remove, set_up_alone};
pub use device::{Tap, TapCounters, TapError};
pub(crate) use gateway::set_up as set_up_gateway;
pub use gateway::{Subnet, gateway_name};
pub use nat::{Nat, NatGateway, TABLE};

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;
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

/// Sets keys of an interface, named with `{}` in place of the interface, below `/proc/sys/net`.
fn set_all(interface: &str, settings: &[(&str, &str)]) -> io::Result<()> {
    for (key, value) in settings {
        let path = PathBuf::from("/proc/sys/net").join(key.replace("{}", interface));
        // A kernel without IPv6 has no such file, and an interface that is gone neither.
        if path.exists() {
            fs::write(&path, value).map_err(|error| {
                io::Error::new(
                    error.kind(),
                    format!("cannot set {}: {error}", path.display()),
                )
            })?;
        }
    }
    Ok(())
}

/// Reads a key below `/proc/sys/net`.
fn read_setting(key: &str) -> io::Result<String> {
    let path = PathBuf::from("/proc/sys/net").join(key);
    let read = fs::read_to_string(&path).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("cannot read {}: {error}", path.display()),
        )
    })?;
    Ok(read.trim().to_owned())
}
