//! Who makes a QEMU migrate.

use super::OutgoingError;
use crate::memory::source::{Continuation, SourceError, resume};
use crate::qmp::{COMMAND_TIMEOUT, Qmp};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::json;
use std::fmt::Debug;
use std::path::Path;

/// Makes a QEMU migrate, and lets its guest go on: by QEMU's own commands ([`ByCommand`]), or as
/// the program wants it that manages the guest.
pub trait Migrator: Debug + Send + Sync {
    /// Returns whether it sets QEMU up for a migration, and back afterwards.
    fn sets_up(&self) -> bool;

    /// Lets QEMU write its stream to the socket at `path`, which listens. Returns when QEMU was
    /// told, or when its connection waits to be accepted.
    fn migrate<'a>(
        &'a self,
        qmp: &'a Qmp,
        path: &'a Path,
    ) -> BoxFuture<'a, Result<(), OutgoingError>>;

    /// Returns whether the connection may come from this process; `qemu` is QEMU's.
    fn connects(&self, qemu: i32, peer: i32) -> bool;

    /// Ends the migration, and lets the guest continue. Does nothing where there is none and the
    /// guest is in the right state.
    fn resume<'a>(
        &'a self,
        qmp: &'a Qmp,
        how: Continuation,
    ) -> BoxFuture<'a, Result<(), SourceError>>;
}

/// QEMU's own commands.
#[derive(Debug, Clone, Copy)]
pub struct ByCommand;

impl Migrator for ByCommand {
    fn sets_up(&self) -> bool {
        false
    }

    fn migrate<'a>(
        &'a self,
        qmp: &'a Qmp,
        path: &'a Path,
    ) -> BoxFuture<'a, Result<(), OutgoingError>> {
        async move {
            let uri = json!({"uri": format!("unix:{}", path.display())});
            qmp.execute("migrate", uri, COMMAND_TIMEOUT).await?;
            Ok(())
        }
        .boxed()
    }

    fn connects(&self, qemu: i32, peer: i32) -> bool {
        peer == qemu
    }

    fn resume<'a>(
        &'a self,
        qmp: &'a Qmp,
        how: Continuation,
    ) -> BoxFuture<'a, Result<(), SourceError>> {
        resume(qmp, how).boxed()
    }
}
