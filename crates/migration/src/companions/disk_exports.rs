//! The exports below a guest's disks as a companion.

use crate::destination::companion::{About, Companion, Offered, Step};
use crate::destination::qemu::DestinationQemu;
use crate::disks::exports::{self, Comes};
use crate::disks::images::grows;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::message::Refusal;

/// The exports below disks of which a part may arrive while the guest runs.
pub(super) struct Arrival(About);

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self(about)
    }
}

impl Companion for Arrival {
    fn started<'a>(
        &'a mut self,
        offered: &'a Offered<'_>,
        qemu: &'a DestinationQemu,
    ) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let places = offered.places.iter();
            let pulled = places.filter(|place| place.offered.pulled != Pulled::Nothing);
            let pulled = pulled.map(|place| Comes {
                pulled: place.offered.pulled,
                name: place.offered.name.clone(),
                image: place.path.clone(),
                grows: grows(&place.offered),
            });
            let pulled: Vec<Comes> = pulled.collect();
            if pulled.is_empty() {
                return Ok(());
            }
            let context = &self.0.context;
            let put_in = qemu
                .put_below(context, offered.offer.migration, &pulled)
                .await;
            put_in.map_err(|error| error.into_refusal(&context.parts.config.name))
        })
    }

    fn ended(&mut self) -> Step<'_, ()> {
        let About { context, guest, .. } = &self.0;
        Box::pin(exports::ended(&context.parts.config.state, guest, false))
    }
}
