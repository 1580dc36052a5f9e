//! Configures the peers: programs that join hosts with encryption. Each is set up as its own
//! documentation advises for one connection at a high rate; the reasons are beside the settings.

pub(super) mod fastd;
pub(super) mod n2n;
pub(super) mod nebula;
pub(super) mod openvpn;
pub(super) mod tinc;
pub(super) mod wireguard;

use std::path::Path;

use super::ground::{printed, version_in};

/// Returns the version that a program prints.
fn version_of(program: &Path, arguments: &[&str]) -> Result<String, String> {
    let said = printed(program, arguments).map_err(|error| error.to_string())?;
    version_in(&said).ok_or_else(|| format!("{} prints no version", program.display()))
}
