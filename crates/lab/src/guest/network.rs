//! Creates the network of guests and their clients: a bridge on every host, joined at the clients'
//! namespace. It is separate from the link between the hosts, and its traffic does not count as a
//! move's.

use crate::error::LabError;
use crate::lab::Host;
use crate::netns::Namespace;

/// The network's name, in each host's configuration.
pub const NETWORK: &str = "clients";
/// The bridge on each host.
pub const BRIDGE: &str = "guests";
/// The TAP device of a guest whose QEMU the laboratory starts itself; one on each host.
pub const TAP: &str = "guest";
/// The hardware address of a guest's card.
pub const GUEST_MAC: &str = "52:54:00:4c:48:02";
/// The guest's address, with the length of its prefix.
pub const GUEST_ADDRESS: &str = "10.78.0.2/24";
const CLIENTS_ADDRESS: &str = "10.78.0.1/24";

/// Makes a namespace for clients a port of a bridge that a host has already.
///
/// # Errors
/// When a part of it cannot be made.
pub fn join(host: &Host, bridge: &str, clients: &Namespace) -> Result<(), LabError> {
    let there = clients.name();
    host.namespace().configure(&format!(
        "link add to-clients type veth peer name {BRIDGE} netns {there}\n\
         link set dev to-clients master {bridge} up\n"
    ))?;
    clients.configure(&format!(
        "addr add {CLIENTS_ADDRESS} dev {BRIDGE}\n\
         link set dev {BRIDGE} up\n"
    ))
}

/// Creates the network around a namespace for the clients.
///
/// # Errors
/// When a part of it cannot be made.
pub fn create(hosts: &[Host], clients: &Namespace) -> Result<(), LabError> {
    clients.configure(&format!(
        "link add {BRIDGE} type bridge\n\
         addr add {CLIENTS_ADDRESS} dev {BRIDGE}\n\
         link set dev {BRIDGE} up\n"
    ))?;
    for host in hosts {
        let (name, there) = (host.name(), clients.name());
        host.namespace().configure(&format!(
            "link add {BRIDGE} type bridge\n\
             link set dev {BRIDGE} up\n\
             link add to-clients type veth peer name {name} netns {there}\n\
             link set dev to-clients master {BRIDGE} up\n\
             tuntap add dev {TAP} mode tap\n\
             link set dev {TAP} master {BRIDGE} up\n"
        ))?;
        clients.configure(&format!("link set dev {name} master {BRIDGE} up\n"))?;
    }
    Ok(())
}
