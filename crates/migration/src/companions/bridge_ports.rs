//! The ports of a guest's cards on this host's bridges as a companion: they must be able to have
//! the VLANs that the cards had, or that the configuration names.

use crate::destination::companion::{About, Companion, Offered, Step};
use longhaul_hypervisor::bridge_port::{filters_vlans, mtu_of};
use longhaul_hypervisor::config::{BridgePort, Network};
use longhaul_protocol::guest::{GuestDescription, Nic};
use longhaul_protocol::message::{Check, Refusal, RefusalCode, Verdict};
use longhaul_protocol::port::Port;

pub(super) struct Arrival(About);

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self(about)
    }
}

impl Companion for Arrival {
    fn look(&self, guest: &GuestDescription) -> Vec<Check> {
        let config = &self.0.context.parts.config;
        let networks = config.hypervisor.all_networks();
        let checks = guest.nics.iter().flat_map(|nic| {
            let Some(Network::Bridge(bridge)) = networks.get(&nic.network) else {
                return lost(&config.name, nic);
            };
            let seen = (filters_vlans(&bridge.bridge), mtu_of(&bridge.bridge));
            checks(&config.name, nic, bridge, seen)
        });
        checks.collect()
    }

    fn check<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let mut checks = self.look(&offered.offer.guest).into_iter();
            match checks.find(|check| check.verdict == Verdict::Refused) {
                None => Ok(()),
                Some(check) => Err(Refusal {
                    code: RefusalCode::Unsuitable,
                    text: check.text,
                    hint: check.hint,
                }),
            }
        })
    }
}

/// Returns the check of a card with a special port, whose network here is no bridge. A network that
/// is unknown is refused elsewhere.
fn lost(host: &str, nic: &Nic) -> Vec<Check> {
    let Some(port) = nic.port.as_ref().filter(|port| !port.vlans.is_empty()) else {
        return Vec::new();
    };
    let network = &nic.network;
    vec![Check {
        verdict: Verdict::Warning,
        text: format!(
            "network {network} of {host} is no bridge: card {} loses {port}",
            nic.mac
        ),
        hint: Some(format!(
            "write a bridge under [networks] for {network} on {host}"
        )),
    }]
}

/// Checks the port of a card on a bridge, of which is known whether it looks at VLANs, and its MTU.
fn checks(
    host: &str,
    nic: &Nic,
    network: &BridgePort,
    (filters, mtu): (Option<bool>, Option<u32>),
) -> Vec<Check> {
    let port: Port = network.port(nic.port.as_ref());
    let (name, bridge) = (&nic.network, &network.bridge);
    let mut checks = Vec::new();
    if !port.vlans.is_empty() && filters != Some(true) {
        let vlans = Port {
            vlans: port.vlans.clone(),
            ..Port::default()
        };
        let text = match filters {
            None => format!("bridge {bridge} of network {name} is not there on {host}"),
            Some(_) => format!(
                "card {} is in {vlans}, and bridge {bridge} on {host} does not look at VLANs \
                 (vlan_filtering 0)",
                nic.mac
            ),
        };
        checks.push(Check {
            verdict: Verdict::Refused,
            text,
            hint: Some(format!(
                "on {host}: ip link set {bridge} type bridge vlan_filtering 1, after its other \
                 ports have their VLANs; or, if all of {bridge} is that network: write vlan = 0 \
                 for {name} under [networks]"
            )),
        });
    }
    if let (Some(wanted), Some(has)) = (port.mtu, mtu)
        && wanted > has
    {
        checks.push(Check {
            verdict: Verdict::Warning,
            text: format!(
                "card {} has MTU {wanted}, and bridge {bridge} on {host} {has}: larger frames do \
                 not leave the host",
                nic.mac
            ),
            hint: Some(format!(
                "raise the MTU of {bridge} and of its uplink, or write mtu = {has} for {name} \
                 under [networks]"
            )),
        });
    }
    checks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bridge_must_be_able_to_do_what_the_port_needs() {
        let mut nic = Nic {
            network: "office".to_owned(),
            mac: "52:54:00:12:34:56".to_owned(),
            port: Some(Port {
                vlans: Port::untagged(10),
                mtu: Some(9000),
                ..Port::default()
            }),
        };
        let mut network = BridgePort::of("br0");
        let verdicts = |nic: &Nic, network: &BridgePort, filters, mtu| -> Vec<Verdict> {
            let checks = checks("paris", nic, network, (filters, Some(mtu)));
            checks.into_iter().map(|check| check.verdict).collect()
        };
        assert_eq!(verdicts(&nic, &network, Some(true), 9000), []);
        assert_eq!(
            verdicts(&nic, &network, Some(false), 1500),
            [Verdict::Refused, Verdict::Warning]
        );
        assert_eq!(verdicts(&nic, &network, None, 9000), [Verdict::Refused]);
        // The configuration wins.
        network.vlan = Some(0);
        network.mtu = Some(1500);
        assert_eq!(verdicts(&nic, &network, Some(false), 1500), []);
        nic.port = None;
        network.vlan = Some(20);
        assert_eq!(
            verdicts(&nic, &network, Some(false), 1500),
            [Verdict::Refused]
        );
        assert_eq!(verdicts(&nic, &network, Some(true), 1500), []);
    }
}
