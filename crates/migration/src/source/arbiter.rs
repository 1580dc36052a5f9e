//! Whether a handover has an arbiter: the plan's check, and the agreement before the offer.

use crate::context::Context;
use crate::host::arbiter::{self, Answer};
use crate::status::failure;
use longhaul_api::{ApiError, Check, Plan, Verdict};
use longhaul_protocol::message::ArbiterQuery;
use longhaul_protocol::wire::VERSION_OF_ARBITERS;
use longhaul_protocol::{Generation, StoreId};

/// The name of the check of the arbiter.
const CHECK: &str = "arbiter";

/// What a handover has an arbiter for.
pub(crate) struct Agreed {
    /// The arbiter's store, if this host reaches it.
    pub(crate) store: Option<StoreId>,
    /// Why the handover has none although the realm has; or that it has one.
    pub(crate) note: Option<String>,
}

/// Gets the lease of the guest's generation: so the arbiter is there, and the next generation is
/// free. `version` is that of the destination's messages.
pub(crate) async fn agree(
    context: &Context,
    (guest, generation): (&str, Generation),
    version: u16,
    required: bool,
) -> Result<Agreed, ApiError> {
    let store = match lease(context, (guest, generation), version).await {
        Ok(store) => store,
        Err(why) if required => return Err(failure::no_arbiter(&why)),
        Err(why) => {
            tracing::info!(guest, why, "the handover has no arbiter");
            let store = None;
            return Ok(Agreed {
                store,
                note: Some(format!("not used: {why}")),
            });
        }
    };
    if store.is_none() && required {
        return Err(failure::no_arbiter("this host's realm names none"));
    }
    let note = store.map(|_| "it is asked in doubt".to_owned());
    Ok(Agreed { store, note })
}

async fn lease(
    context: &Context,
    (guest, generation): (&str, Generation),
    version: u16,
) -> Result<Option<StoreId>, String> {
    let networks = &context.parts.networks;
    let Some(store) = arbiter::named(networks) else {
        return Ok(None);
    };
    if version < VERSION_OF_ARBITERS {
        return Err("the destination's version knows no arbiters".to_owned());
    }
    match arbiter::acquire(networks, store, guest, generation).await {
        Answer::Granted => Ok(Some(store)),
        Answer::Denied(latest, holder) => Err(format!(
            "the arbiter gave generation {} of {guest} to {holder} before",
            latest.0
        )),
        Answer::None(why) => Err(why),
    }
}

/// Returns the question to the destination, if this host's realm names an arbiter.
pub(crate) fn question(context: &Context, required: bool) -> Option<ArbiterQuery> {
    let store = arbiter::named(&context.parts.networks)?;
    Some(ArbiterQuery { store, required })
}

/// Returns the plan's check of this host, if the realm names an arbiter or one is required.
pub(crate) fn check(context: &Context, guest: &str, required: bool) -> Option<Check> {
    let networks = &context.parts.networks;
    let without = "leave out --require-arbiter: doubt is then ended by an operator";
    let Some(store) = arbiter::named(networks) else {
        let text = "this host's realm names no arbiter";
        return required.then(|| Check::refuse(CHECK, text, without));
    };
    if arbiter::is_reached(networks, store) {
        let text = format!(
            "this host reaches the realm's arbiter: if the destination is lost in the handover, \
             {guest} continues here; the destination asks it while {guest} is stopped"
        );
        return Some(Check::ok(CHECK, text));
    }
    let text = "this host does not reach the realm's arbiter: if the destination is lost in the \
                handover, an operator has to decide";
    Some(match required {
        true => Check::refuse(CHECK, text, without),
        false => Check::warn(CHECK, text, "longhaul realm show says why"),
    })
}

/// Returns whether a planned handover has an arbiter, by the plan's checks.
pub(crate) fn is_agreed(plan: &Plan) -> bool {
    let mut checks = plan.checks.iter();
    let here = checks.any(|check| check.name == CHECK && check.verdict == Verdict::Ok);
    let mut there = plan
        .checks
        .iter()
        .filter(|check| check.name == "destination");
    // An older destination says nothing of it.
    here && there.any(|check| check.verdict == Verdict::Ok && check.message.contains(CHECK))
}
