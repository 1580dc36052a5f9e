//! All guests of a host: those of the launcher, and those of other programs.

use crate::guest::StopError;
use crate::launcher::Launcher;
use crate::manager::{
    AbortError, Commit, CommitError, Cookie, Departure, Found, Guest, GuestManager, IncomingGuest,
    IncomingSocket, LaunchIncomingError, Launched, Lease, ManagerError, Stays,
};
use crate::starter::Starter;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use longhaul_protocol::guest::{GuestDescription, Managed, Manager};
use longhaul_protocol::message::{Check, Verdict};
use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// The launcher, and the programs that manage guests beside it.
#[derive(Clone)]
pub struct Managers {
    launcher: Launcher,
    others: Vec<(Manager, Arc<dyn GuestManager>)>,
}

impl Managers {
    /// The guests of the launcher, and of these programs.
    pub fn new(launcher: Launcher, others: Vec<(Manager, Arc<dyn GuestManager>)>) -> Self {
        Self { launcher, others }
    }

    fn by(&self, manager: Option<Manager>) -> Option<&dyn GuestManager> {
        let Some(manager) = manager else {
            return Some(&self.launcher);
        };
        let mut others = self.others.iter();
        let other = others.find(|(by, _)| *by == manager);
        other.map(|(_, guests)| &**guests)
    }

    /// Returns the manager of a guest.
    fn of(&self, guest: &Guest) -> &dyn GuestManager {
        // No other manager makes handles of its guests.
        self.by(guest.owner().manager()).unwrap_or(&self.launcher)
    }

    fn all(&self) -> impl Iterator<Item = &dyn GuestManager> {
        let launcher: &dyn GuestManager = &self.launcher;
        let others = self.others.iter().map(|(_, guests)| &**guests);
        std::iter::once(launcher).chain(others)
    }
}

fn not_here(by: Manager) -> String {
    format!("it is a guest of {by}, which this host does not have")
}

impl GuestManager for Managers {
    fn list(&self) -> io::Result<Vec<Found>> {
        let mut all: Vec<Found> = Vec::new();
        for manager in self.all() {
            for found in manager.list()? {
                // Names are unique here, and Longhaul's own guests were known by theirs first.
                if all.iter().all(|known| known.name() != found.name()) {
                    all.push(found);
                }
            }
        }
        Ok(all)
    }

    fn find(&self, name: &str) -> io::Result<Option<Guest>> {
        // Longhaul's own guests do not depend on any other program.
        for manager in self.all() {
            if let Some(guest) = manager.find(name)? {
                return Ok(Some(guest));
            }
        }
        Ok(None)
    }

    fn starter(&self, guest: &Guest) -> io::Result<Option<Starter>> {
        self.of(guest).starter(guest)
    }

    fn lease<'a>(
        &'a self,
        guest: &'a Guest,
        within: Duration,
    ) -> BoxFuture<'a, Result<Lease, ManagerError>> {
        self.of(guest).lease(guest, within)
    }

    fn expect(&self, guest: &GuestDescription) -> Vec<Check> {
        self.all()
            .flat_map(|manager| manager.expect(guest))
            .collect()
    }

    fn outlook(&self, guest: &Guest) -> io::Result<Cookie> {
        self.of(guest).outlook(guest)
    }

    fn obstacles(&self, guest: &GuestDescription, outlook: &Managed, follows: bool) -> Vec<Check> {
        match self.by(Some(outlook.by)) {
            Some(manager) => manager.obstacles(guest, outlook, follows),
            None => vec![Check {
                verdict: Verdict::Refused,
                text: not_here(outlook.by),
                hint: Some(format!(
                    "enable {} in that agent's configuration",
                    outlook.by
                )),
            }],
        }
    }

    fn allocate<'a>(
        &'a self,
        guest: &'a str,
        image: &'a str,
        bytes: u64,
    ) -> BoxFuture<'a, Result<bool, ManagerError>> {
        async move {
            for manager in self.all() {
                if manager.allocate(guest, image, bytes).await? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        .boxed()
    }

    fn free<'a>(&'a self, guest: &'a str) -> BoxFuture<'a, ()> {
        async move {
            for manager in self.all() {
                manager.free(guest).await;
            }
        }
        .boxed()
    }

    fn launch_incoming(
        &self,
        incoming: IncomingGuest,
    ) -> BoxFuture<'_, Result<Launched, LaunchIncomingError>> {
        let by = incoming.managed.as_ref().map(|managed| managed.by);
        match self.by(by) {
            Some(manager) => manager.launch_incoming(incoming),
            None => {
                let text = by.map(not_here).unwrap_or_default();
                async { Err(LaunchIncomingError::Unsuitable(text)) }.boxed()
            }
        }
    }

    fn incoming_socket(&self, guest: &Guest) -> io::Result<IncomingSocket> {
        self.of(guest).incoming_socket(guest)
    }

    fn commit<'a>(
        &'a self,
        guest: &'a Guest,
        lease: Option<&'a Lease>,
        commit: Commit,
    ) -> BoxFuture<'a, Result<(), CommitError>> {
        self.of(guest).commit(guest, lease, commit)
    }

    fn has_never_run(&self, guest: &str) -> io::Result<bool> {
        for manager in self.all() {
            if manager.has_never_run(guest)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn abort_incoming<'a>(
        &'a self,
        guest: &'a str,
        lease: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            // Each does nothing if no guest of that name arrives at it.
            for manager in self.all() {
                manager.abort_incoming(guest, lease).await?;
            }
            Ok(())
        }
        .boxed()
    }

    fn begin<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
    ) -> BoxFuture<'a, Result<Cookie, ManagerError>> {
        self.of(guest).begin(guest, lease)
    }

    fn depart<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        prepared: Cookie,
    ) -> BoxFuture<'a, Result<Departure, ManagerError>> {
        self.of(guest).depart(guest, lease, prepared)
    }

    fn departed<'a>(&'a self, guest: &'a Guest) -> BoxFuture<'a, Result<Cookie, ManagerError>> {
        self.of(guest).departed(guest)
    }

    fn note_stop(&self, guest: &Guest, stops: bool) -> io::Result<()> {
        self.of(guest).note_stop(guest, stops)
    }

    fn settle<'a>(&'a self, moving: &'a BTreeSet<String>) -> BoxFuture<'a, ()> {
        async move {
            for manager in self.all() {
                manager.settle(moving).await;
            }
        }
        .boxed()
    }

    fn abort_outgoing<'a>(
        &'a self,
        guest: &'a Guest,
        lease: &'a Lease,
        stays: Stays,
    ) -> BoxFuture<'a, Result<(), AbortError>> {
        self.of(guest).abort_outgoing(guest, lease, stays)
    }

    fn settle_guest(&self, guest: &str) {
        self.all().for_each(|manager| manager.settle_guest(guest));
    }

    fn confirm<'a>(
        &'a self,
        guest: &'a str,
        lease: Option<&'a Lease>,
    ) -> BoxFuture<'a, Result<(), StopError>> {
        async move {
            let own = self.launcher.list();
            let own = own.map_err(|source| StopError {
                guest: guest.to_owned(),
                what: "looking for it".to_owned(),
                source,
            })?;
            self.launcher.confirm(guest, lease).await?;
            if own.iter().any(|found| found.name() == guest) {
                // Another program may have one of the same name.
                return Ok(());
            }
            for (_, manager) in &self.others {
                // It does nothing if no guest of that name departs from it.
                manager.confirm(guest, lease).await?;
            }
            Ok(())
        }
        .boxed()
    }
}
