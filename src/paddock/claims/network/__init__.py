"""Network policies of claims, within the policies of templates, teams and the installation."""
