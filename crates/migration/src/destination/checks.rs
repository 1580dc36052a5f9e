//! Checks of whether this host could run a guest.

use crate::destination::Destination;
use crate::destination::companion::About;
use longhaul_hypervisor::capabilities::{QemuAccount, USERFAULTFD_HINT, can_run, has_huge_pages};
use longhaul_hypervisor::config::RunsAsRoot;
use longhaul_protocol::guest::GuestDescription;
use longhaul_protocol::machine::Machine;
use longhaul_protocol::message::{Answer, Check, Verdict};
use tokio::task::block_in_place;

impl Destination {
    /// Returns all checks of whether this host could run a guest.
    pub(crate) async fn local_checks(
        &self,
        guest: &GuestDescription,
        machine: &Machine,
        without_disks: bool,
    ) -> Answer {
        let answer = self.checks_now(guest, machine, without_disks).await;
        let mut verdicts = answer.checks.iter().map(|check| check.verdict);
        let refused = verdicts.any(|verdict| verdict == Verdict::Refused);
        // Retained QEMUs of guests that left are no reason to refuse: they end, and the checks run
        // again.
        if refused && self.retained_qemus.make_way().await {
            return self.checks_now(guest, machine, without_disks).await;
        }
        answer
    }

    /// Returns a refusal if the memory of a guest cannot follow when it runs here. A program that
    /// manages it gives its QEMU an account of its own, and says itself what that lacks.
    pub(crate) async fn may_follow(
        &self,
        guest: &GuestDescription,
        is_managed: bool,
    ) -> Option<Check> {
        let (why, hint) = match has_huge_pages(guest) {
            true => {
                let why = "it has pages above 4 KiB".to_owned();
                (why, "leave out --strategy".to_owned())
            }
            false => {
                let prober = &self.parts.prober;
                let account = match is_managed {
                    true => QemuAccount::Agent,
                    false => QemuAccount::Configured,
                };
                let why = prober.keeps_memory_from_following(&guest.machine, account);
                let why = why.await?;
                (why, format!("{USERFAULTFD_HINT}; or leave out --strategy"))
            }
        };
        let host = &self.parts.config.name;
        Some(Check {
            verdict: Verdict::Refused,
            text: format!(
                "the memory of {} cannot follow it to {host}: {why}",
                guest.name
            ),
            hint: Some(hint),
        })
    }

    async fn checks_now(
        &self,
        guest: &GuestDescription,
        machine: &Machine,
        without_disks: bool,
    ) -> Answer {
        let host = self.parts.config.name.clone();
        let refused = |text: String, hint: Option<String>| Check {
            verdict: Verdict::Refused,
            text,
            hint,
        };
        let mut checks = block_in_place(|| self.parts.guests.expect(guest));
        if checks.iter().any(|check| check.verdict == Verdict::Refused) {
            return Answer { host, checks };
        }
        checks.extend(match self.parts.prober.capabilities().await {
            Ok(capabilities) => can_run(&host, guest, Some(machine), &capabilities),
            Err(error) => vec![refused(format!("{host}: {error}"), None)],
        });
        if let Err(error) = self.parts.config.hypervisor.qemu.check_user() {
            let text = format!("{host} cannot run {}: {error}", guest.name);
            checks.push(refused(text, Some(RunsAsRoot::HINT.to_owned())));
        }
        let unshared = guest.disks.iter().find(|disk| disk.is_local());
        let described = longhaul_hypervisor::description::check(guest);
        if let Err(error) = &described {
            let text = format!("{host} cannot run {}: {error}", guest.name);
            checks.push(refused(text, None));
        }
        if let Some(disk) = unshared.filter(|_| without_disks) {
            checks.push(refused(
                format!(
                    "disk {} of {} is not on storage that both hosts see",
                    disk.name, guest.name
                ),
                Some(
                    "let it move with the guest (--disks auto), or put it on shared storage and \
                     write \
                     `shared = true` in its description"
                        .into(),
                ),
            ));
        }
        match block_in_place(|| self.parts.guests.list()) {
            Ok(found) if found.iter().any(|found| found.name() == guest.name) => {
                checks.push(refused(
                    format!("{host} has a guest called {} already", guest.name),
                    Some(format!(
                        "on {host}: longhaul guests, and stop or rename the one there"
                    )),
                ));
            }
            Ok(_) => {}
            Err(error) => {
                let text = format!("{host} cannot look for guests: {error}");
                checks.push(refused(text, None));
            }
        }
        if described.is_ok() {
            let about = About {
                context: self.context.clone(),
                guest: guest.name.clone(),
                shown: None,
            };
            checks.extend(self.companions(&about).look(guest));
        }
        Answer { host, checks }
    }
}
