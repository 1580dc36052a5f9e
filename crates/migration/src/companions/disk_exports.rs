//! The exports below a guest's disks as a companion.

use crate::context::Context;
use crate::destination::companion::{About, Companion, Offered, Step};
use crate::destination::qemu::DestinationQemu;
use crate::disks::export_notes;
use crate::disks::exports::{self, Comes};
use crate::disks::images::grows;
use crate::residue::{Again, Residue};
use crate::source::companion as source;
use crate::source::disk_graph::GraphWatch;
use crate::source::exports::Fronts;
use crate::source::qemu::SourceQemu;
use crate::source::sender::Sending;
use longhaul_api::ApiError;
use longhaul_hypervisor::Guest;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_protocol::disk::Pulled;
use longhaul_protocol::message::Refusal;
use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;

/// Interval between attempts to remove an export.
const AGAIN_EVERY: Duration = Duration::from_secs(2);
/// Interval between checks that the exports answer that track writes.
const TRACKED_EVERY: Duration = Duration::from_secs(30);

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
                image: place.path().to_owned(),
                size: place.export_size(),
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

/// The exports below disks that move, and the watch for changes that others make to the block
/// graph.
pub(super) struct Departure {
    about: source::About,
    fronts: Fronts,
    graph: Option<GraphWatch>,
}

impl Departure {
    pub(super) fn new(about: source::About) -> Self {
        Self {
            about,
            fronts: Fronts::none(),
            graph: None,
        }
    }
}

impl source::Companion for Departure {
    /// Samples the graph, before the disks are examined: so no change falls in between.
    fn check<'a>(&'a mut self, _guest: &'a Guest, qmp: &'a Qmp) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async move {
            self.graph = Some(GraphWatch::begin(qmp).await?);
            Ok(())
        })
    }

    fn started<'a>(
        &'a mut self,
        qemu: &'a SourceQemu,
        sending: &'a Arc<Sending>,
        verify: bool,
    ) -> Step<'a, Result<(), ApiError>> {
        Box::pin(async move {
            if !qemu.disks().is_empty() {
                let state = &self.about.context.parts.config.state;
                let put_in = Fronts::put_in(state, qemu, (sending, verify)).await;
                self.fronts = put_in.map_err(exports::FrontError::into_api)?;
            }
            match &mut self.graph {
                Some(graph) => graph.go_on_with(self.fronts.below().to_vec()).await,
                None => Ok(()),
            }
        })
    }

    fn watch(&self) -> Result<(), ApiError> {
        self.fronts.check()?;
        self.graph.as_ref().map_or(Ok(()), GraphWatch::check)
    }

    fn closed(&mut self) -> Step<'_, Result<(), ApiError>> {
        Box::pin(async move {
            // It holds a control connection to QEMU, and the disks are closed.
            let graph = self.graph.take();
            let look = async {
                match graph {
                    Some(mut graph) => graph.finish().await,
                    None => Ok(()),
                }
            };
            tokio::try_join!(self.fronts.caught_up(), look)?;
            self.fronts.check()
        })
    }

    /// Ends the exports, and sets the images aside.
    fn committed(&mut self) -> Step<'_, ()> {
        let source::About { context, guest, .. } = &self.about;
        Box::pin(exports::ended(&context.parts.config.state, guest, true))
    }

    /// Removes the exports from below the disks. If this fails, the guest works with them in place,
    /// and the sweeper tries again.
    fn resumed<'a>(&'a mut self, guest: &'a Guest, qmp: &'a Qmp) -> Step<'a, ()> {
        Box::pin(async move {
            self.graph = None;
            self.fronts = Fronts::none();
            let context = &self.about.context;
            let state = &context.parts.config.state;
            if let Err(error) = exports::take_out(state, guest, qmp).await {
                tracing::error!(guest = guest.name(), %error, "still below a disk");
            }
            context.sweeper.wake();
        })
    }
}

/// Exports of guests that no migration uses, and those that track writes without a migration.
#[derive(Default)]
pub(super) struct Exports {
    known: Mutex<Known>,
}

/// What is known from earlier sweeps.
#[derive(Default)]
struct Known {
    /// The notes that were logged as unreadable.
    logged: BTreeSet<PathBuf>,
    /// The exports that track writes, by their nodes, whose QEMU's end wakes the sweeper.
    watched: BTreeSet<String>,
}

impl Residue for Exports {
    fn open(&self, state: &Path) -> io::Result<()> {
        exports::notes_in(state).remove_unfinished()?;
        export_notes::remove_stray_logs::<exports::Note>(state)
    }

    fn sweep<'a>(&'a self, context: &'a Arc<Context>) -> Step<'a, Again> {
        Box::pin(async move {
            let Known { logged, watched } = &mut *self.known.lock().await;
            match context.sweep_exports(logged, watched).await {
                true if watched.is_empty() => None,
                true => Some(TRACKED_EVERY),
                false => Some(AGAIN_EVERY),
            }
        })
    }
}
