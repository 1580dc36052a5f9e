//! The files of a guest that do not move, as a companion: they are compared before QEMU is
//! launched, and QEMU must have opened the compared ones.

use crate::destination::companion::{About, Companion, Offered, Step};
use crate::destination::files::{self, Bringing, Proof};
use crate::destination::qemu::DestinationQemu;
use longhaul_protocol::message::{Refusal, RefusalCode, Verdict};
use tokio::task::block_in_place;

pub(super) struct Arrival {
    about: About,
    proof: Proof,
}

impl Arrival {
    pub(super) fn new(about: About) -> Self {
        Self {
            about,
            proof: Proof::default(),
        }
    }
}

fn unsuitable(text: String, hint: Option<String>) -> Refusal {
    Refusal {
        code: RefusalCode::Unsuitable,
        text,
        hint,
    }
}

impl Companion for Arrival {
    fn check<'a>(&'a mut self, offered: &'a mut Offered<'_>) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let About { context, guest, .. } = &self.about;
            let Offered {
                peer,
                offer,
                claims,
                disks,
                ..
            } = offered;
            // A source that is too old offers only the disks that a guest writes.
            let about = (&offer.guest, Bringing::Offered(disks));
            self.proof = files::prove(context, peer, about, *claims).await;
            let mut checks = self.proof.checks.iter();
            if let Some(check) = checks.find(|check| check.verdict == Verdict::Refused) {
                return Err(unsuitable(check.text.clone(), check.hint.clone()));
            }
            if self.proof.wanted.is_empty() {
                return Ok(());
            }
            let host = &context.parts.config.name;
            Err(unsuitable(
                format!("{host} has other files for {guest} than when it was asked before"),
                Some("try again: they are then compared once more".to_owned()),
            ))
        })
    }

    fn started<'a>(
        &'a mut self,
        _arriving: &'a Offered<'_>,
        qemu: &'a DestinationQemu,
    ) -> Step<'a, Result<(), Refusal>> {
        Box::pin(async move {
            let host = &self.about.context.parts.config.name;
            let hint = || Some("let its files be, and try again".to_owned());
            let held = block_in_place(|| self.proof.holds(qemu.pid()));
            held.map_err(|why| unsuitable(format!("{host}: {why}"), hint()))
        })
    }
}
