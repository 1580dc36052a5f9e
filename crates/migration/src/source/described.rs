//! Describes a guest as it is when it leaves: with what QEMU and this host's network have made of
//! its description, so that the destination makes the same.

use longhaul_api::{ApiError, Check, ErrorCode};
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::bridge_port;
use longhaul_hypervisor::observe;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::guest::GuestDescription;

const PORTS: &str = "VLANs, MTU and flags of the guest's TAP devices have to move along: \
                     `bridge vlan show` (iproute2) and /sys/class/net must show them to the agent";
/// The model of the device that tells a guest whether it was cloned.
const GENERATION_ID: &str = "vmgenid";

/// Returns a guest's description with the ports of its cards and its generation id as they are now.
pub(crate) async fn described(guest: &Guest, qmp: &Qmp) -> Result<GuestDescription, ApiError> {
    let mut description = guest.description().clone();
    let ports = bridge_port::of_guest(qmp, guest.pid(), &description).await;
    let mut ports =
        ports.map_err(|error| ApiError::new(ErrorCode::Refused, error.to_string()).hint(PORTS))?;
    for (index, nic) in description.nics.iter_mut().enumerate() {
        nic.port = ports.remove(&index);
    }
    let hardware = description.hardware.iter_mut();
    let devices = hardware.flat_map(|hardware| &mut hardware.devices);
    for device in devices.filter(|device| device.model == GENERATION_ID) {
        // With `auto` the destination's QEMU would choose a new one, which tells the guest that it
        // is a clone.
        let id = observe::generation_id(qmp).await;
        let id = id.map_err(|error| ApiError::new(ErrorCode::Qemu, error.to_string()))?;
        if let Some(id) = id {
            device.properties.insert("guid".to_owned(), id);
        }
    }
    Ok(description)
}

/// Returns a check for each special port.
pub(crate) fn ports(guest: &GuestDescription) -> Vec<Check> {
    let nics = guest.nics.iter().filter_map(|nic| {
        let port = nic.port.as_ref()?;
        let text = format!("card {} keeps {port}", nic.mac);
        Some(Check::ok("network", text))
    });
    nics.collect()
}
