//! The places of a guest's cards in the networks of the realm, as a companion: pinned to the
//! destination before the guest runs there, announced when it runs, and withdrawn at the source.
//! The guest's flows through gateways of these networks come along.
//!
//! Nothing depends on it: without it, other hosts learn the guest's place from its frames, and
//! flows are lost. So errors are logged, and the move goes on.

use crate::destination::companion as destination;
use crate::destination::companion::{Offered, Step};
use crate::destination::qemu::DestinationQemu;
use crate::source::companion as source;
use crate::source::qemu::SourceQemu;
use crate::source::sender::Sending;
use longhaul_api::ApiError;
use longhaul_network::networks::Card;
use longhaul_protocol::flows::Flows;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::message::Refusal;
use std::sync::Arc;

/// Returns the guest's cards. An address that cannot be read is in no network.
fn cards(guest: &GuestDescription) -> Vec<Card> {
    let cards = guest.nics.iter().enumerate().filter_map(|(number, nic)| {
        Some(Card {
            number: u16::try_from(number).ok()?,
            network: nic.network.clone(),
            mac: nic.mac.parse().ok()?,
        })
    });
    cards.collect()
}

/// The cards at the destination.
pub(super) struct Arrival {
    about: destination::About,
    cards: Vec<Card>,
    flows: Flows,
}

impl Arrival {
    pub(super) fn new(about: destination::About) -> Self {
        Self {
            about,
            cards: Vec::new(),
            flows: Flows::default(),
        }
    }
}

impl destination::Companion for Arrival {
    fn started<'a>(
        &'a mut self,
        offered: &'a Offered<'_>,
        _qemu: &'a DestinationQemu,
    ) -> Step<'a, Result<(), Refusal>> {
        self.cards = cards(&offered.offer.guest);
        Box::pin(async { Ok(()) })
    }

    fn committed(&mut self) -> Step<'_, ()> {
        let networks = &self.about.context.parts.networks;
        if let Some((_, generation)) = &self.about.shown
            && let Err(error) = networks.arrived(&self.cards, generation.0)
        {
            let guest = &self.about.guest;
            tracing::warn!(guest, %error, "its place in its networks is only learned");
        }
        let flows = std::mem::take(&mut self.flows);
        if let Err(error) = networks.add_flows(&self.cards, &flows) {
            let (guest, count) = (&self.about.guest, flows.flows.len());
            tracing::warn!(guest, count, %error, "its flows through gateways are lost");
        }
        Box::pin(async {})
    }

    fn flows(&mut self, flows: &Flows) {
        self.flows = flows.clone();
    }

    fn running(&mut self) -> Option<Step<'static, ()>> {
        let networks = &self.about.context.parts.networks;
        if let Err(error) = networks.announce(&self.cards) {
            let guest = &self.about.guest;
            tracing::warn!(guest, %error, "its place in its networks is not announced");
        }
        None
    }
}

/// The cards at the source.
pub(super) struct Departure {
    about: source::About,
    cards: Vec<Card>,
}

impl Departure {
    pub(super) fn new(about: source::About) -> Self {
        Self {
            about,
            cards: Vec::new(),
        }
    }

    fn withdraw(&self) {
        let about = &self.about;
        let parts = &about.context.parts;
        let Some((_, generation)) = &about.shown else {
            return;
        };
        let host = match parts.trust.by_name(&about.host) {
            Ok(Some(host)) => host.id,
            Ok(None) => return,
            Err(error) => {
                return tracing::warn!(guest = about.guest, %error, "its place is not withdrawn");
            }
        };
        if let Err(error) = parts.networks.departed(&self.cards, host, generation.0) {
            tracing::warn!(guest = about.guest, %error, "its place is not withdrawn");
        }
    }
}

impl source::Companion for Departure {
    fn started<'a>(
        &'a mut self,
        qemu: &'a SourceQemu,
        _sending: &'a Arc<Sending>,
        _verify: bool,
    ) -> Step<'a, Result<(), ApiError>> {
        self.cards = cards(qemu.guest().description());
        Box::pin(async { Ok(()) })
    }

    fn flows(&mut self) -> Option<Flows> {
        let networks = &self.about.context.parts.networks;
        let flows = networks.flows_of(&self.cards);
        (!flows.flows.is_empty()).then_some(flows)
    }

    fn committed(&mut self) -> Step<'_, ()> {
        self.withdraw();
        Box::pin(async {})
    }
}
