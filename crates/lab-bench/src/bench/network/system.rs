//! Defines what the bench measures: a way to join two hosts, by the product, by a peer, or by the
//! kernel.

use super::ground::{Ground, INNER, INNER_ADDRESSES, Tunnel};
use super::{longhaul, peers};
use longhaul_lab::error::LabError;

/// What a system is compared as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The way itself.
    Raw,
    /// Ethernet frames, in the kernel, in clear.
    Kernel,
    /// Ethernet frames, encrypted, by a program.
    Layer2,
    /// IP packets, encrypted, by a program.
    Layer3,
    /// The product.
    Longhaul,
}

/// A way to join two hosts.
pub(super) trait System: Sync {
    /// Its name in the rows.
    fn name(&self) -> &'static str;

    /// What it is compared as.
    fn kind(&self) -> Kind;

    /// Returns its version; or else why it cannot be measured, and what to do.
    fn version(&self) -> Result<String, String>;

    /// Joins the hosts. They need not answer yet.
    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError>;
}

/// All systems, in the order in which they take turns.
pub(super) const SYSTEMS: &[&dyn System] = &[
    &Raw,
    &longhaul::Longhaul,
    &Vxlan,
    &peers::openvpn::OpenVpn,
    &peers::tinc::Tinc,
    &peers::n2n::N2n,
    &peers::fastd::Fastd,
    &peers::wireguard::VxlanOverWireGuard,
    &peers::nebula::Nebula,
    &peers::wireguard::WireGuard,
];

/// Returns the kernel's release, which is the version of what it does itself.
fn kernel() -> Result<String, String> {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map(|text| format!("Linux {}", text.trim()))
        .map_err(|error| format!("the kernel's release cannot be read: {error}"))
}

/// The way without a network on top.
struct Raw;

impl System for Raw {
    fn name(&self) -> &'static str {
        "veth"
    }

    fn kind(&self) -> Kind {
        Kind::Raw
    }

    fn version(&self) -> Result<String, String> {
        kernel()
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        Ok(Tunnel::new(ground.outer()?, &ground.device(0)?))
    }
}

/// The kernel's VXLAN between two addresses, without encryption. The kernel derives its MTU from
/// the interface below.
struct Vxlan;

impl System for Vxlan {
    fn name(&self) -> &'static str {
        "vxlan"
    }

    fn kind(&self) -> Kind {
        Kind::Kernel
    }

    fn version(&self) -> Result<String, String> {
        kernel()
    }

    fn start(&self, ground: &Ground) -> Result<Tunnel, LabError> {
        let mut tunnel = Tunnel::new(INNER_ADDRESSES, INNER);
        let devices = [ground.device(0)?, ground.device(1)?];
        add_vxlan(ground, &mut tunnel, ground.outer()?, &devices)?;
        ground.address(&tunnel, INNER, INNER_ADDRESSES)?;
        Ok(tunnel)
    }
}

/// Adds the kernel's VXLAN between two addresses, over these interfaces.
pub(super) fn add_vxlan(
    ground: &Ground,
    tunnel: &mut Tunnel,
    addresses: [&str; 2],
    devices: &[String; 2],
) -> Result<(), LabError> {
    for (host, node) in ground.hosts()?.into_iter().enumerate() {
        tunnel.remove_with_it(node, INNER);
        node.namespace().configure(&format!(
            "link add {INNER} type vxlan id 42 local {} remote {} dstport 4789 dev {}\n",
            addresses[host],
            addresses[1 - host],
            devices[host]
        ))?;
    }
    Ok(())
}
