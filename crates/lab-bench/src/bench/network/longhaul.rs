//! Measures the product's frame plane, by the program that runs one end of it without an agent.

use std::path::PathBuf;

use super::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel};
use super::system::{Kind, System};
use longhaul_lab::error::LabError;
use longhaul_lab::netns;
use longhaul_lab::process::own_binary;

/// The program, an example of the crate `network`.
const PROGRAM: &str = "examples/plane-end";
const PORT: u16 = 7400;

/// The frame plane with AES-256-GCM and all offloads. The MTU of the network is 1500: what does not
/// fit the way goes in two datagrams, and TCP's segments are cut to what fits.
pub(super) struct Longhaul;

impl System for Longhaul {
    fn name(&self) -> &'static str {
        "longhaul"
    }

    fn kind(&self) -> Kind {
        Kind::Longhaul
    }

    fn version(&self) -> Result<String, String> {
        program().map(|_| env!("CARGO_PKG_VERSION").to_owned())
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let program = program().map_err(LabError::Which)?;
        let outer = ground.outer()?;
        // Both ends have the same key for this run; in use, keys come from the connection of two
        // agents.
        let key: String = "a key of 32 bytes for the bench.".to_owned();
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        for host in [1, 0] {
            let file = ground.file(host, "plane.key", &key)?;
            let mut command = netns::command(&program);
            for end in [host, 1 - host] {
                command.arg(format!("{}:{PORT}", outer[end]));
            }
            command.arg(file).arg(INNER);
            ground.start(&mut tunnel, host, command)?;
        }
        ground.address(&tunnel, INNER, INNER_ADDRESSES)?;
        Ok(tunnel)
    }
}

fn program() -> Result<PathBuf, String> {
    let hint = "not built: cargo build --release -p longhaul-network --example plane-end";
    own_binary(PROGRAM).map_err(|_| hint.to_owned())
}
