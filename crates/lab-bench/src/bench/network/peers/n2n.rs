//! Configures n2n: two edges and a supernode, by which they find each other.

use super::version_of;
use crate::bench::network::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel, program};
use crate::bench::network::system::{Kind, System};
use longhaul_lab::error::LabError;
use longhaul_lab::netns;

/// The supernode's port, and the edges'.
const SUPERNODE_PORT: u16 = 7654;
const EDGE_PORT: u16 = 7655;

/// n2n. Version 3 encrypts with AES; version 1, which Debian has, knows Twofish alone. The MTU is
/// each version's default.
pub(in crate::bench::network) struct N2n;

impl System for N2n {
    fn name(&self) -> &'static str {
        "n2n"
    }

    fn kind(&self) -> Kind {
        Kind::Layer2
    }

    fn version(&self) -> Result<String, String> {
        program("supernode", "n2n")?;
        version_of(&program("edge", "n2n")?, &["-h"])
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let [edge, supernode] =
            ["edge", "supernode"].map(|name| program(name, "n2n").map_err(LabError::Which));
        let (edge, supernode) = (edge?, supernode?);
        let version = self.version().map_err(LabError::Which)?;
        let is_old = version.starts_with("1.");
        let outer = ground.outer()?;
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        let mut command = netns::command(supernode);
        match is_old {
            true => command.args(["-l", &SUPERNODE_PORT.to_string()]),
            false => command.args(["-f", "-p", &SUPERNODE_PORT.to_string()]),
        };
        ground.start(&mut tunnel, 1, command)?;
        for host in [1, 0] {
            let mut command = netns::command(&edge);
            command.args(["-d", INNER, "-c", "lab", "-k", "a key of the bench"]);
            command.args(["-l", &format!("{}:{SUPERNODE_PORT}", outer[1])]);
            command.args(["-p", &EDGE_PORT.to_string()]);
            let address = INNER_ADDRESSES[host];
            match is_old {
                true => command.args(["-a", address, "-s", "255.255.255.0"]),
                // In the foreground, as root in the namespace, with AES.
                false => command
                    .args(["-f", "-u", "0", "-g", "0", "-A3"])
                    .args(["-a", &format!("static:{address}/24")]),
            };
            ground.start(&mut tunnel, host, command)?;
        }
        Ok(tunnel)
    }
}
