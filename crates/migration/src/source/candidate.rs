//! A guest that could move, and its destination.

use crate::context::Context;
use crate::host::right::Holder;
use crate::status::failure;
use longhaul_api::{ApiError, ErrorCode};
use longhaul_hypervisor::manager::Found;
use longhaul_hypervisor::qmp::Qmp;
use longhaul_hypervisor::{Guest, memory};
use longhaul_protocol::Generation;
use longhaul_transport::TrustedHost;

/// A guest that could move, its destination, and the generation of its right.
pub(crate) struct Candidate {
    pub(crate) guest: Guest,
    pub(crate) host: TrustedHost,
    pub(crate) generation: Generation,
}

/// Finds a guest and a host by name. Refuses what can be refused without a question to either.
pub(crate) fn candidate(context: &Context, name: &str, to: &str) -> Result<Candidate, ApiError> {
    let found = context.parts.guests.find(name);
    let running =
        found.map_err(|error| failure::internal(&format!("cannot look for guests: {error}")))?;
    let right = context
        .rights
        .get(name)
        .map_err(|error| failure::internal(&error.to_string()))?;
    let Some(guest) = running else {
        if let Some(right) = right
            && let longhaul_storage::Holder::Elsewhere { host } = right.holder
        {
            return Err(failure::not_here(name, &Holder::Elsewhere(host)));
        }
        let list = context.parts.guests.list().unwrap_or_default();
        let foreign = list.into_iter().find_map(|found| match found {
            Found::Foreign {
                name: called,
                by,
                why,
            } if called == name => Some((by, why)),
            _ => None,
        });
        if let Some((by, why)) = foreign {
            let text = format!("{name} is a guest of {by} that cannot be moved: {why}");
            let error = ApiError::new(ErrorCode::Refused, text);
            return Err(error.state_of_guest(format!("nothing was moved; {name} runs here")));
        }
        let error = ApiError::new(ErrorCode::GuestUnknown, format!("{name} does not run here"));
        return Err(error.hint("`longhaul guests` lists those that do"));
    };
    let generation = match right {
        None => Generation(guest.generation().max(1)),
        Some(right) => match right.holder {
            longhaul_storage::Holder::Here => right.generation,
            longhaul_storage::Holder::Elsewhere { host } => {
                return Err(failure::not_here(name, &Holder::Elsewhere(host)));
            }
            longhaul_storage::Holder::InDoubt { host } => {
                return Err(failure::not_here(name, &Holder::InDoubt(host)));
            }
        },
    };
    let host = context
        .parts
        .trust
        .by_name(to)
        .map_err(|error| failure::internal(&error.to_string()))?
        .ok_or_else(|| {
            ApiError::new(
                ErrorCode::HostUnknown,
                format!("there is no trusted host called {to}"),
            )
            .hint("`longhaul host list` lists them; `longhaul host trust` adds one")
            .state_of_guest(format!("nothing was moved; {name} runs here"))
        })?;
    Ok(Candidate {
        guest,
        host,
        generation,
    })
}

/// Returns whether a guest is paused. Returns an error for a state that a move cannot preserve.
pub(crate) async fn is_paused(qmp: &Qmp) -> Result<bool, ApiError> {
    let status = qmp.query("query-status").await;
    let status = status.map_err(|error| ApiError::new(ErrorCode::Qemu, error.to_string()))?;
    let runs = memory::runs(status["status"].as_str().unwrap_or_default());
    runs.map(|runs| !runs)
        .map_err(|error| ApiError::new(ErrorCode::GuestState, error.to_string()))
}
