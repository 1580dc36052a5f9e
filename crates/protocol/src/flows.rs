//! The flows of a guest through gateways of its networks, which move along with it.

use crate::HostId;
use crate::wire::{WireError, limit};
use serde::{Deserialize, Serialize};

/// Most flows in one message, of all cards together.
pub const FLOWS_MAX: usize = 16_384;
/// Most gateways that they go through.
pub const GATEWAYS_MAX: usize = 1024;

/// One end of a flow: an IPv4 address and a port, or what stands for a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct End {
    /// The address.
    pub address: [u8; 4],
    /// The port of TCP and UDP, the identifier of an ICMP echo, or 0.
    pub port: u16,
}

/// Packets of one protocol between a guest and something behind a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Flow {
    /// IPv4's number of the protocol.
    pub protocol: u8,
    /// The guest's end.
    pub guest: End,
    /// The other end.
    pub other: End,
}

/// How far a flow has come, as far as its age depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FlowState {
    /// TCP: nothing has come from the other end.
    Opening,
    /// TCP: something has come.
    Open,
    /// TCP: one end has sent its last byte.
    Ending,
    /// TCP: one end has reset it.
    Broken,
    /// Another protocol: nothing has come from the other end.
    Unanswered,
    /// Another protocol: something has come.
    Answered,
    /// The fragments of packets, which have no ports.
    Fragments,
}

/// A flow, and the gateway that it began at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CarriedFlow {
    /// The number of the guest's card in its description.
    pub card: u16,
    /// The number of the gateway in the message's list.
    pub gateway: u16,
    /// The flow.
    pub flow: Flow,
    /// Its state.
    pub state: FlowState,
    /// How long nothing was seen of it, in seconds.
    pub idle_s: u32,
}

/// The flows of a guest that moves.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flows {
    /// The hosts whose gateways the flows began at.
    pub gateways: Vec<HostId>,
    /// The flows.
    pub flows: Vec<CarriedFlow>,
}

impl Flows {
    /// Adds a flow of a card, if there is room. Returns whether there is.
    pub fn add(&mut self, card: u16, gateway: HostId, carried: (Flow, FlowState, u32)) -> bool {
        let known = self.gateways.iter().position(|known| *known == gateway);
        let at = known.unwrap_or(self.gateways.len());
        if self.flows.len() >= FLOWS_MAX || at >= GATEWAYS_MAX {
            return false;
        }
        if known.is_none() {
            self.gateways.push(gateway);
        }
        let (flow, state, idle_s) = carried;
        self.flows.push(CarriedFlow {
            card,
            // Below GATEWAYS_MAX.
            gateway: at as u16,
            flow,
            state,
            idle_s,
        });
        true
    }

    /// Checks the limits of a message.
    pub(crate) fn check(&self) -> Result<(), WireError> {
        let gateways = self.gateways.len() as u64;
        limit("the number of gateways", gateways, GATEWAYS_MAX as u64)?;
        let count = self.flows.len() as u64;
        limit("the number of flows", count, FLOWS_MAX as u64)?;
        self.flows.iter().try_for_each(|flow| {
            let gateway = u64::from(flow.gateway) + 1;
            limit("the number of a flow's gateway", gateway, gateways)
        })
    }

    /// Returns the flows of a card, each with its gateway.
    pub fn of_card(&self, card: usize) -> impl Iterator<Item = (HostId, &CarriedFlow)> {
        let flows = self.flows.iter();
        let own = flows.filter(move |carried| usize::from(carried.card) == card);
        own.filter_map(|carried| {
            let gateway = self.gateways.get(usize::from(carried.gateway))?;
            Some((*gateway, carried))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::ToDestination;
    use crate::wire::{decode, encode};

    #[test]
    fn the_limits_of_a_message_hold_in_both_directions() {
        let carried = |gateway| CarriedFlow {
            card: 0,
            gateway,
            flow: Flow {
                protocol: 6,
                guest: End {
                    address: [10, 0, 0, 5],
                    port: 40_000,
                },
                other: End {
                    address: [192, 0, 2, 1],
                    port: 80,
                },
            },
            state: FlowState::Open,
            idle_s: 3,
        };
        let message = |gateways, flows| {
            let gateways = vec![HostId([7; 32]); gateways];
            ToDestination::Flows(Flows { gateways, flows })
        };
        let (most, gateways) = (FLOWS_MAX, GATEWAYS_MAX);
        for good in [
            message(1, vec![carried(0)]),
            message(gateways, vec![carried(gateways as u16 - 1); most]),
            message(0, Vec::new()),
        ] {
            assert_eq!(decode(&encode(&good).unwrap()), Ok(good));
        }
        let seed = include_bytes!("../../../fuzz/seeds/message/flows");
        assert_eq!(encode(&message(1, vec![carried(0)])).unwrap(), seed);
        let line = |bytes: &[u8]| {
            let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            hex.join(" ")
        };
        let lines: Vec<String> = seed.chunks(32).map(line).collect();
        let page = include_str!("../../../docs/wire.md");
        assert!(page.contains(&format!("\n{}\n", lines.join("\n"))));
        for bad in [
            message(1, vec![carried(1)]),
            message(gateways + 1, Vec::new()),
            message(1, vec![carried(0); most + 1]),
        ] {
            let bytes = postcard::to_stdvec(&bad).unwrap();
            let refused = decode::<ToDestination>(&bytes);
            assert!(
                matches!(refused, Err(WireError::Limit { .. })),
                "{refused:?}"
            );
        }
    }

    #[test]
    fn flows_keep_to_the_limits_of_one_message_and_share_their_gateways() {
        let end = |port| End {
            address: [10, 0, 0, 1],
            port,
        };
        let carried = |port| {
            let flow = Flow {
                protocol: 6,
                guest: end(port),
                other: end(80),
            };
            (flow, FlowState::Open, 1)
        };
        let host = |number: u16| {
            let mut id = [0; 32];
            id[..2].copy_from_slice(&number.to_be_bytes());
            HostId(id)
        };
        let mut flows = Flows::default();
        for number in 0..GATEWAYS_MAX as u16 {
            assert!(flows.add(0, host(number), carried(number)));
        }
        assert!(!flows.add(0, host(u16::MAX), carried(1)), "a gateway more");
        while flows.flows.len() < FLOWS_MAX {
            assert!(flows.add(1, host(3), carried(9)));
        }
        assert!(!flows.add(1, host(3), carried(9)), "a flow more");
        assert_eq!(flows.gateways.len(), GATEWAYS_MAX);
        assert_eq!(flows.of_card(0).count(), GATEWAYS_MAX);
        let of_other: Vec<_> = flows.of_card(1).map(|(gateway, _)| gateway).collect();
        assert_eq!(of_other, vec![host(3); FLOWS_MAX - GATEWAYS_MAX]);
        flows.gateways.truncate(3);
        assert_eq!(flows.of_card(1).count(), 0, "a gateway that is not listed");
    }
}
